"""Mistakes in settings, which end a run before anything is loaded."""

from checks.faults.fault import fault
from checks.faults.lab import Lab
from checks.faults.rewards import correctness


@fault(
    "a setting is misspelled", r"learning_rat\b|learning_rate", r"did you mean|there is no|unknown"
)
def setting_misspelled(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(trainer__learning_rat=1e-6))


@fault("a setting has a value that is no number", r"batch_size", r"number|integer")
def setting_no_number(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(trainer__batch_size="many"))


@fault("the settings file is not YAML", r"settings\.yaml|\.yaml", r"line \d|YAML|parse|read")
def setting_file_damaged(lab: Lab) -> None:
    path = lab.directory / "settings.yaml"
    path.write_text("trainer:\n  batch_size: 4\n   max_steps: [\n")
    lab.strike()
    lab.train(lab.settings(config=path))


@fault("the model does not exist", r"no-such-model", r"no such|not found|does not exist|cannot|hub")
def setting_model_missing(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(model__name=lab.directory / "no-such-model"))


@fault("a GPU is asked for that is not there", r"cuda|GPU", r"no |not |none")
def setting_no_gpu(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(trainer__device="cuda"))


@fault(
    "batch and group sizes of a script do not fit together",
    r"num_generations",
    r"multiple|divi|fit|answers",
)
def setting_batch_indivisible(lab: Lab) -> None:
    lab.strike()
    reward = correctness(lab, lambda scores: scores)
    lab.script(reward, per_device_train_batch_size=10, num_generations=4)


@fault(
    "an argument of a script does not exist",
    r"num_generation\b|num_generation,",
    r"did you mean|unknown|no such|there is no",
)
def setting_unknown_argument(lab: Lab) -> None:
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), num_generation=4)


@fault(
    "the library of an experiment tracker is not installed",
    r"mlflow|trackio|wandb",
    r"not installed|install|key",
)
def setting_tracker_missing(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(trackers__names=["wandb"]))
