"""Log of a supervised fine-tuning run: console, run directory and trackers."""

from dataclasses import asdict

from trainer.observe.run_dir import Recorder
from trainer.sft.learner import Update
from trainer.timing import CpuClock, StageClock


class SftLog:
    """Log of rank 0."""

    def __init__(self, recorder: Recorder, total_steps: int, gpus: int) -> None:
        self.recorder = recorder
        self.clock = StageClock()
        self._cpu = CpuClock()
        self._total_steps = total_steps
        self._gpus = gpus

    def begin(self) -> None:
        """Starts the clocks."""
        self.clock.lap()
        self._cpu.lap()

    def step(self, step: int, epoch: float, examples: int, update: Update) -> None:
        """Records a step, after `epoch` passes over the data."""
        seconds = self.clock.lap()
        record = {
            "step": step,
            "epoch": epoch,
            "examples": examples,
            "completion_tokens": update.trained_tokens / examples,
            "seconds": seconds,
            "cpu_seconds": self._cpu.lap(),
            "gpus": self._gpus,
            "update": asdict(update),
        }
        text = (
            f"step {step:>4}/{self._total_steps}  loss {update.loss:.4f}  "
            f"tokens {update.trained_tokens}  norm {update.grad_norm:.3g}  "
            f"{sum(seconds.values()):.2f} s"
        )
        if update.skipped:
            text += "  skipped: the gradient is not finite"
        self.recorder.measured(record, text)

    def evaluation(self, step: int, loss: float, num_samples: int) -> None:
        """Records the mean negative log-probability of a held-out answer's token, in nats."""
        self.recorder.evaluated(
            {"step": step, "loss": loss, "num_samples": num_samples},
            f"evaluation at step {step}: held-out loss {loss:.4f} ({num_samples} examples)",
        )
