"""Python source of a model or of a data set, read and never run."""

import ast


def parse_python(source: str) -> ast.Module:
    """Returns the syntax tree of a program. Raises SyntaxError, whatever is wrong with it."""
    try:
        try:
            return ast.parse(source)
        except SystemError:
            # Before 3.11.8, Python counts the depth of two trees together (gh-106905): the second
            # is parsed when a collection of garbage logs the traceback of a lost error.
            return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from None
