"""An engine whose thread dies at the first request; it has the arguments of `python -m
services.engine`."""

from services.engine.__main__ import main
from services.engine.model import Model

if __name__ == "__main__":
    Model.decode = None  # type: ignore[method-assign,assignment]
    main()
