"""The runs that are rehearsed, and the speed of their engines and updates on H100s."""

from dataclasses import dataclass

ENGINES = "engines"
"""What a GPU of the trainer waits for while an answer is not there yet: no time of the host."""
BANDWIDTH = 3.0e12
"""Bytes per second that a GPU reads, as `benchmarks/h100.py` has it."""
PEAK = 989e12
"""FLOPs per second in bfloat16, from the data sheet."""
MFU = 0.45
"""Share of the peak that an update reaches; measured on an H200: 52 % for layers of 7B, 59 % for
layers of 32B (docs/reports/archive/2026-11-27-gpu.md)."""
_MEMORY = 80e9
_FREE_SHARE = 0.85
"""Share of a GPU's memory for weights, keys and values; SGLang keeps the rest for activations."""
_DISK = 2.0e9
"""Bytes per second at which an engine loads weights from files."""


@dataclass(frozen=True)
class Case:
    """A run at its true size.

    The engines read `read_parameters` for every token step; an update computes
    `computed_parameters` for every token.
    """

    name: str
    about: str
    groups: int
    group_size: int
    prompt: int
    """Tokens of a prompt."""
    tokens: int
    """Tokens of the longest answer."""
    parameters: float
    read_parameters: float
    computed_parameters: float
    kv_bytes: int
    """Bytes of keys and values of a token, in all layers."""
    engines: int
    gpus_per_engine: int
    ranks: int
    max_staleness: int = 0
    shortest: float = 1.0
    """Lengths are uniform between this share of `tokens` and all of it."""
    layers: int = 0
    top_k: int = 0
    """Experts of a token in each of `layers`, recorded for routing replay; 0: none."""
    turns: int = 0
    """Calls of an episode; 0: single completions."""

    @property
    def answer_tokens(self) -> float:
        """Tokens of all answers of a step, in the mean."""
        of_call = self.tokens * (1 + self.shortest) / 2
        return self.groups * self.group_size * max(1, self.turns) * of_call

    @property
    def pass_s_per_token(self) -> float:
        """Seconds that a rank's GPU computes for a token of a pass, forward and backward."""
        return 6 * self.computed_parameters / (PEAK * MFU)

    def speed(self, engines: int, share: float, clock: float, slots: int) -> dict[str, float]:
        """Returns the engine of a rehearsal with `engines` processes that stand for a `share` of
        this case's engines (`stand_in/sglang`).
        """
        each = self.engines * share / engines
        memory = self.gpus_per_engine * _MEMORY * _FREE_SHARE - 2 * self.parameters
        bandwidth = self.gpus_per_engine * BANDWIDTH
        return {
            "slots": int(slots * each),
            "kv_tokens": int(memory / self.kv_bytes * each),
            "weights_s": 2 * self.read_parameters / bandwidth,
            "kv_s": self.kv_bytes / bandwidth / each,
            "load_s": 2 * self.parameters / _DISK,
            "clock": clock,
            "vocabulary": 151_936,
            "shortest": self.shortest,
            "layers": self.layers,
            "top_k": self.top_k,
        }


_7B = 7.6e9
_7B_KV = 28 * 2 * 4 * 128 * 2
CASES = (
    Case(
        name="7b",
        about="7B, 512 prompts × 16 answers of 8,192 tokens, 8 + 8 H100",
        groups=512,
        group_size=16,
        prompt=200,
        tokens=8192,
        engines=8,
        gpus_per_engine=1,
        ranks=8,
        parameters=_7B,
        read_parameters=_7B,
        computed_parameters=_7B,
        kv_bytes=_7B_KV,
    ),
    Case(
        name="32b",
        about="32B, 256 prompts × 16 answers of up to 32k tokens, staleness 2, 32 + 32 H100",
        groups=256,
        group_size=16,
        prompt=400,
        tokens=32_000,
        shortest=0.1,
        parameters=32.8e9,
        read_parameters=32.8e9,
        computed_parameters=32.8e9,
        kv_bytes=64 * 2 * 8 * 128 * 2,
        engines=8,
        gpus_per_engine=4,
        ranks=32,
        max_staleness=2,
    ),
    Case(
        name="30b-a3b",
        about="30B-A3B with routing replay, 512 prompts × 16 answers of 8,192 tokens, 16 + 16 H100",
        groups=512,
        group_size=16,
        prompt=200,
        tokens=8192,
        parameters=30.5e9,
        # With hundreds of sequences, every expert is read for every token step.
        read_parameters=30.5e9,
        computed_parameters=3.3e9,
        kv_bytes=48 * 2 * 4 * 128 * 2,
        engines=8,
        gpus_per_engine=2,
        ranks=16,
        layers=48,
        top_k=8,
    ),
    Case(
        name="agents",
        about="7B, 1,024 episodes of 50 calls, 32k tokens of context, 8 + 8 H100",
        groups=128,
        group_size=8,
        prompt=400,
        tokens=512,
        shortest=0.5,
        turns=50,
        engines=8,
        gpus_per_engine=1,
        ranks=8,
        parameters=_7B,
        read_parameters=_7B,
        computed_parameters=_7B,
        kv_bytes=_7B_KV,
    ),
    Case(
        name="wide",
        about="7B, 2,048 prompts × 16 answers of 8,192 tokens, 64 engines and 64 ranks",
        groups=2048,
        group_size=16,
        prompt=200,
        tokens=8192,
        engines=64,
        gpus_per_engine=1,
        ranks=64,
        max_staleness=1,
        parameters=_7B,
        read_parameters=_7B,
        computed_parameters=_7B,
        kv_bytes=_7B_KV,
    ),
)
BY_NAME = {case.name: case for case in CASES}
