"""Runs the program of one rank, with the exit statuses of the job group. Without torch: a wrong
setting is told before that is imported.
"""

import signal
from collections.abc import Callable

from common.errors import ConfigError, ServiceError
from common.process.cli import fail
from common.process.logs import log_exit_reason
from common.process.topology import setting_status
from trainer.trackers.thread import exit_despite_hung_tracker


def run_rank(main: Callable[[], None]) -> None:
    """Runs `main`; exits with `setting_status()` for a wrong setting, 1 for any other named error,
    130 for Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    with exit_despite_hung_tracker():
        try:
            main()
        except ConfigError as error:
            fail(error, setting_status())
        except ServiceError as error:
            fail(error, status=1)
        except KeyboardInterrupt:
            log_exit_reason(
                "interrupted; start again with the same run directory to continue from its newest "
                "checkpoint",
                code="interrupted",
            )
            raise SystemExit(130) from None
    from learning.ranks import end

    end()
