"""All sections of the settings together, before anything checks that they fit one another."""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, model_validator

from common.settings.algorithm import AlgorithmSection
from common.settings.section import InHelp, Named, Section
from common.settings.sections import (
    CheckpointSection,
    CriticSection,
    DataSection,
    EnvironmentSection,
    EvaluationSection,
    LimitsSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    ReplaySection,
    RewardSection,
    RolloutSection,
    RuntimeSection,
    SamplingSection,
    TeacherSection,
    TinkerSection,
    TrackersSection,
    TrainerSection,
)
from common.settings.sources import holds_several, read_text

IN_RUN_DIR = Path("RUN_DIR/state")
"""Placeholder for `state` in the run directory, because the state belongs to its run."""


class Settings(Section):
    """Every section, and the settings of no section."""

    model_config = ConfigDict(validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_as_text(cls, content: Any) -> Any:
        """Reads a list or a mapping that is written as text, with commas, from wherever it comes:
        the command line, the environment, a file or Python.
        """
        if not isinstance(content, dict):
            return content
        read = dict(content)
        for section, settings in content.items():
            known = cls.model_fields.get(section)
            fields = getattr(known and known.annotation, "model_fields", {})
            if isinstance(settings, dict):
                read[section] = dict(settings)
                for name, value in settings.items():
                    if isinstance(value, str) and name in fields and holds_several(fields[name]):
                        read[section][name] = read_text(fields[name], value, name)
        return read

    seed: InHelp[NonNegativeInt] = 0
    """Seed of data order, sampling and dropout."""
    reproducible: InHelp[bool] = False
    """Compute so that two runs with the same settings have the same weights after every step, to
    the last bit, on one machine and at any load. Steps take longer
    (docs/how-to/audit.md#reproducible-runs)."""
    state_dir: Named[Path] = IN_RUN_DIR
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
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    limits: LimitsSection = LimitsSection()
    environment: EnvironmentSection = EnvironmentSection()
    runtime: RuntimeSection = RuntimeSection()
    tinker: TinkerSection = TinkerSection()
    trackers: TrackersSection = TrackersSection()
