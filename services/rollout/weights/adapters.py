"""LoRA adapters on an engine: the newest is loaded beside the older ones, which go when no request can name them any more.

An adapter's name is its run and version, so it never means other weights. Nothing is paused and nothing is flushed: a request
is answered with the adapter that it names from its first token to its last, whatever is loaded meanwhile, and one that names
an adapter which is not there is refused (400). An engine's own version label stays that of the model it was started with.
"""

from pathlib import Path

from common.errors import ServiceError
from common.schemas import WeightManifest, adapter_name
from services.rollout.engine_client import EngineClient, LoadFailed


async def load_adapter(engine: EngineClient, directory: Path, manifest: WeightManifest, keep: int, timeout_s: float) -> None:
    """Has the engine serve the adapter in `directory`, and unload all but the newest `keep` of its run.

    Unloading waits for the requests that use an adapter. Raises LoadFailed or ServiceError when the engine refuses.
    """
    name = adapter_name(manifest.run_id, manifest.version)
    loaded = await loaded_adapters(engine)
    if name not in loaded:
        body = {"lora_name": name, "lora_path": str(directory)}
        loaded = await _changed(engine, "/load_lora_adapter", body, timeout_s, wanted=True)
        if loaded.get(name) != str(directory):
            raise LoadFailed(f"the engine has the adapters {sorted(loaded)}, not {name}", field="lora_name", value=name)
    own = sorted(other for other in loaded if other.startswith(f"{manifest.run_id}-v"))
    for other in sorted(loaded.keys() - {name, *own[-keep:]}):
        await _changed(engine, "/unload_lora_adapter", {"lora_name": other}, timeout_s, wanted=False)


async def _changed(engine: EngineClient, path: str, body: dict[str, str], timeout_s: float, wanted: bool) -> dict[str, str]:
    """The adapters after a call. What an attempt has done whose answer was lost, an engine refuses to do again: no error."""
    try:
        await engine.request("POST", path, json=body, deadline_s=timeout_s)
    except ServiceError:
        loaded = await loaded_adapters(engine)
        if (body["lora_name"] in loaded) != wanted:
            raise
        return loaded
    return await loaded_adapters(engine)


async def loaded_adapters(engine: EngineClient) -> dict[str, str]:
    """Names of the adapters that the engine has, and their directories."""
    listed = (await engine.request("GET", "/v1/models", deadline_s=30)).json()["data"]
    return {str(card["id"]): str(card["root"]) for card in listed if card.get("parent") is not None}
