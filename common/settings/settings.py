"""All sections of the settings together, before anything checks that they fit one another."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from common.settings.algorithm import AlgorithmSection
from common.settings.section import InHelp
from common.settings.sections import (
    CriticSection,
    DataSection,
    EnvironmentSection,
    EvaluationSection,
    LoraSection,
    ModelSection,
    ReplaySection,
    RewardSection,
    RolloutSection,
    RuntimeSection,
    SamplingSection,
    TeacherSection,
    TrackersSection,
    TrainerSection,
)

IN_RUN_DIR = Path("RUN_DIR/state")
"""Placeholder for `state` in the run directory, because the state belongs to its run."""


class Settings(BaseModel):
    """Every section, and the settings of no section."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,
    )

    seed: InHelp[NonNegativeInt] = 0
    """Seed of data order, sampling and dropout. A run is repeatable with the same seed."""
    state_dir: Path = IN_RUN_DIR
    """Directory for what services keep across restarts: data position, replay store, weights and
    logs."""
    max_body_mb: PositiveInt = 256
    """Largest request body that a service accepts, in MB."""
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    reward: RewardSection = RewardSection()
    replay: ReplaySection = ReplaySection()
    critic: CriticSection = CriticSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    teacher: TeacherSection = TeacherSection()
    trainer: TrainerSection = TrainerSection()
    environment: EnvironmentSection = EnvironmentSection()
    runtime: RuntimeSection = RuntimeSection()
    trackers: TrackersSection = TrackersSection()
