"""Memory estimates: shapes are compared with published sizes, bytes with numbers calculated by
hand."""

import pytest

from common.errors import ConfigError
from common.models.memory import (
    ModelShape,
    fastest_fit,
    trainer_host_bytes,
    trainer_memory,
)
from common.settings.config import load
from tests.support.errors import raises
from tests.support.models.model_shapes import GPU, QWEN_05B, QWEN_7B, QWEN_30B_A3B, engine_of


def test_parameters_are_those_of_the_published_models() -> None:
    assert QWEN_05B.parameters == 494_032_768
    assert QWEN_7B.parameters == 7_615_616_512
    # A layer of 0.5B: q, o 2·896², k, v 2·896·128, MLP 3·896·4864, biases 896 + 2·128, norms 2·896.
    assert QWEN_05B.layer_parameters == 1_605_632 + 229_376 + 13_074_432 + 1_152 + 1_792
    llama = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    llama_8b = ModelShape.of(
        {"model_type": "llama", **llama, "num_key_value_heads": 8, "vocab_size": 128256}
    )
    assert llama_8b.parameters == 8_030_261_248


def test_a_trainer_of_7b_on_eight_gpus() -> None:
    config = load(["--trainer.activation_checkpointing", "true", "--algorithm.kl_coef", "0.01"], {})
    memory = trainer_memory(QWEN_7B, config, 8)
    share = 7_615_616_512 // 8
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * share, 4 * share, 8 * share)
    assert (memory.reference, memory.critic) == (4 * share, 0)
    # The peak is the backward pass of the head. Gathered in bfloat16: a layer (233,057,792
    # parameters), embedding and head (2 · 152,064 · 3,584), and the last norm.
    assert memory.gathered == 2 * (233_057_792 + 1_089_998_336)
    assert memory.reducing == 4 * 544_997_376  # the gradient of the head in float32
    # The inputs of 28 layers, the output of the embedding in float32, and four states of the head
    # in bfloat16.
    assert memory.activations == 16_384 * (28 * 3584 * 2 + 3584 * (4 + 4 * 2))
    # The gradients of all logits and of the head in bfloat16.
    assert memory.logits == 2 * (16_384 * 152_064 + 544_997_376)
    # Per token in a layer: norms 2·3584·(4 + 4), attention 2·128·(56 + 16), MLP 4·2·18944.
    assert QWEN_7B.activation_bytes(2) == 57_344 + 18_432 + 151_552
    assert memory.held == 20 * share
    assert memory.total == memory.held + sum(
        (memory.gathered, memory.reducing, memory.activations, memory.logits, 3 << 30)
    )
    kept = trainer_memory(QWEN_7B, load([], {}), 8)
    assert kept.activations == 16_384 * (28 * 227_328 + 3584 * (4 + 4 * 2))
    assert kept.reference == 0


@pytest.mark.parametrize(
    ("options", "ranks", "held"),
    [
        ([], 1, 16),
        ([], 4, 4),
        (["--parallel.shard_size", "2"], 4, 8),
        (["--parallel.shard_size", "1"], 4, 16),
        (["--parallel.offload_optimizer", "true"], 4, 0),
        (["--algorithm.name", "ppo"], 4, 8),
        (["--algorithm.kl_coef", "0.1", "--parallel.offload_reference", "true"], 4, 4),
    ],
)
def test_bytes_held_per_parameter(options: list[str], ranks: int, held: int) -> None:
    assert trainer_memory(QWEN_05B, load(options, {}), ranks).held == held * QWEN_05B.parameters


def test_lora_holds_the_model_in_bfloat16_and_trains_the_adapter() -> None:
    config = load(["--lora.rank", "16"], {})
    memory = trainer_memory(QWEN_7B, config, 1)
    adapter = 28 * 16 * ((3584 + 3584) * 2 + (3584 + 512) * 2 + (3584 + 18944) * 3)
    assert adapter == 40_370_176  # the number PEFT prints for this rank on all linear layers
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        2 * 7_615_616_512 + 4 * adapter,
        4 * adapter,
        8 * adapter,
    )
    assert trainer_host_bytes(QWEN_7B, config, 1, 1) == 12 * adapter + (4 << 30)
    only = load(
        [
            "--lora.rank",
            "16",
            "--lora.target_modules",
            '["q_proj","v_proj"]',
            "--rollout.engine",
            "embedded",
        ],
        {},
    )
    assert trainer_memory(QWEN_7B, only, 1).optimizer == 8 * 28 * 16 * (2 * 3584 + 3584 + 512)


def test_host_memory_of_a_trainer_node() -> None:
    settings = ["--trainer.weight_sync", "distributed", "--trainer.max_staleness", "1"]
    assert trainer_host_bytes(QWEN_7B, load(settings, {}), 8, 8) == (
        12 + 2 + 2
    ) * 7_615_616_512 + 8 * (4 << 30)
    offloaded = load(["--parallel.offload_optimizer", "true"], {})
    assert trainer_host_bytes(QWEN_7B, offloaded, 8, 4) == (12 + 16 // 2) * 7_615_616_512 + 4 * (
        4 << 30
    )
    # Parked: 12 bytes per parameter, and a copy of the published weights.
    together = load(["--rollout.colocate", "true"], {})
    assert trainer_host_bytes(QWEN_7B, together, 8, 8) == (12 + 2 + 12) * 7_615_616_512 + 8 * (
        4 << 30
    )


def test_an_offloaded_adapter_takes_the_frozen_model_with_it() -> None:
    words = ["--lora.rank", "16", "--rollout.engine", "embedded"]
    there, away = (
        trainer_host_bytes(QWEN_7B, load([*words, *more], {}), 1, 1)
        for more in ([], ["--parallel.offload_optimizer", "true"])
    )
    assert 2 * 7_615_616_512 < away - there < 2.2 * 7_615_616_512


def test_gradients_of_the_whole_model_are_kept_where_they_are_small() -> None:
    few, many = (trainer_memory(QWEN_05B, load([], {}), ranks) for ranks in (1, 4))
    assert many.reducing - few.reducing == 4 * QWEN_05B.parameters
    large = trainer_memory(QWEN_7B, load([], {}), 4)
    assert large.reducing < 4 * QWEN_7B.parameters


def test_memory_of_the_engine_cache() -> None:
    one, two = (
        engine_of(QWEN_7B, load(["--rollout.tensor_parallel_size", str(size)], {}), GPU)
        for size in (1, 2)
    )
    assert one.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2 == 57_344
    assert one.kv_tokens == (68 * 10**9 - 15_231_233_024) // 57_344
    assert (two.weights, two.kv_bytes_per_token) == (7_615_616_512, 28_672)
    many = engine_of(QWEN_7B, load(["--rollout.tensor_parallel_size", "28"], {}), GPU)
    assert many.kv_bytes_per_token == 2 * 28 * 128 * 2  # a KV head cannot be split
    assert engine_of(QWEN_7B, load([], {}), 10**10).kv_tokens == 0


def test_impossible_values_are_refused_by_name() -> None:
    with raises(ConfigError, field="parallel.shard_size"):
        trainer_memory(QWEN_7B, load(["--parallel.shard_size", "3"], {}), 8)
    with raises(ConfigError, field="rollout.tensor_parallel_size"):
        engine_of(QWEN_7B, load(["--rollout.tensor_parallel_size", "8"], {}), GPU)
    with pytest.raises(ConfigError) as caught:
        ModelShape.of({"model_type": "mixtral"})
    assert (caught.value.field, caught.value.value) == ("model_type", "mixtral")
    with raises(ConfigError, field="config.json", value="hidden_size"):
        ModelShape.of({"model_type": "llama", "num_attention_heads": 4})


def test_experts_are_counted_as_in_the_published_models() -> None:
    assert QWEN_30B_A3B.parameters == 30_532_122_624
    # A layer: q and o 2·2048·4096, k and v 2·2048·512, norms 2·128 + 2·2048, the router, the experts.
    experts = 128 * 3 * 2048 * 768
    assert QWEN_30B_A3B.layer_parameters == 18_874_368 + 4352 + 128 * 2048 + experts
    with pytest.raises(ConfigError) as caught:
        ModelShape.of({"model_type": "qwen3_moe", "decoder_sparse_step": 2})
    assert (caught.value.field, caught.value.value) == ("decoder_sparse_step", "2")


def test_ranks_that_share_out_experts_gather_fewer_and_hold_as_much() -> None:
    words = ["--trainer.activation_checkpointing", "true", "--trainer.micro_batch_tokens", "65536"]
    config = load(words, {})
    one, eight = (trainer_memory(QWEN_30B_A3B, config, 16, expert_ranks=count) for count in (1, 8))
    assert one.held == eight.held
    # Two layers are gathered in bfloat16, at the peak in the backward pass of a layer.
    assert one.gathered - eight.gathered == 2 * 2 * 128 * 3 * 2048 * 768 * 7 // 8
    # Eight times, a token's states of 2,048 numbers travel to its experts and back.
    assert eight.activations - one.activations == 65_536 * 8 * 2 * 2048 * 2


@pytest.mark.parametrize(
    ("room", "checkpointing", "reshard"),
    [
        (150e9, False, False),
        (140e9, "selective", False),
        (100e9, "selective", False),
        (90e9, "selective", True),
        (72e9, True, False),
        (40e9, True, True),
        (1e9, True, True),
    ],
)
def test_auto_is_the_fastest_that_fits(
    room: float, checkpointing: bool | str, reshard: bool
) -> None:
    config = load(["--trainer.micro_batch_tokens", "16384"], {})
    settings = fastest_fit(QWEN_7B, config, 8, room)
    decided = (
        settings.trainer.activation_checkpointing,
        settings.parallel.reshard_after_forward,
    )
    assert decided == (checkpointing, reshard)


def test_auto_leaves_alone_what_is_set() -> None:
    words = ["--trainer.activation_checkpointing", "selective"]
    settings = fastest_fit(QWEN_7B, load(words, {}), 8, 1e9)
    assert (settings.trainer.activation_checkpointing, settings.parallel.reshard_after_forward) == (
        "selective",
        True,
    )
    words = ["--parallel.reshard_after_forward", "false"]
    settings = fastest_fit(QWEN_7B, load(words, {}), 8, 1e9)
    assert (settings.trainer.activation_checkpointing, settings.parallel.reshard_after_forward) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("longest", "room", "tokens", "checkpointing"),
    [
        # One answer and its prompt, or two and theirs: what lies between would be half empty.
        (8192, 72e9, 8192 + 512, "selective"),
        (8192, 127e9, 3 * 8192 + 512, "selective"),
        (8192, 40e9, 3 * 8192 + 512, True),
        (32_768, 72e9, 32_768 + 512, True),
        # Short answers fill any pass: a shorter one that recomputes less is faster.
        (512, 72e9, 8192, "selective"),
        (512, 127e9, 24_576, "selective"),
        (512, 1e9, 2048, True),
    ],
)
def test_auto_passes_are_full_of_the_longest_answers_and_the_fastest_that_fit(
    longest: int, room: float, tokens: int, checkpointing: bool | str
) -> None:
    config = load(["--sampling.max_new_tokens", str(longest)], {})
    decided = fastest_fit(QWEN_7B, config, 8, room)
    assert decided.trainer.micro_batch_tokens == tokens
    assert decided.trainer.activation_checkpointing == checkpointing
    fits = trainer_memory(QWEN_7B, decided, 8).total <= room
    assert fits == (room > 1e9)


def test_ranks_that_compute_a_row_together_share_its_pass() -> None:
    words = ["--sampling.max_new_tokens", "8192", "--parallel.context_size", "4"]
    decided = fastest_fit(QWEN_7B, load(words, {}), 8, 72e9)
    full = {(answers * 8192 + 512) // 4 for answers in range(1, 16)}
    assert decided.trainer.pass_tokens in full
    assert decided.trainer.pass_tokens > (8192 + 512) // 4


def test_weights_of_policy_and_critic_are_not_gathered_together() -> None:
    words = ["--algorithm.name", "ppo"]
    assert fastest_fit(QWEN_05B, load(words, {}), 8, 1e12).parallel.reshard_after_forward is True
    assert fastest_fit(QWEN_05B, load([], {}), 8, 1e12).parallel.reshard_after_forward is False


def test_ranks_that_compute_long_answers_together_need_the_memory_of_short_ones() -> None:
    """An answer longer than a pass is a pass; of two ranks each computes half of it."""

    def activations(answer: int, together: int) -> int:
        words = ["--sampling.max_new_tokens", str(answer)]
        words += ["--parallel.context_size", str(together)]
        return trainer_memory(QWEN_7B, load(words, {}), 8).activations

    assert activations(16_384, 1) == activations(100, 1) == activations(65_536, 4)
    assert activations(65_536, 1) == 4 * activations(16_384, 1)
