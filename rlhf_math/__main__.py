"""`python -m rlhf_math COMMAND`: the command `rlhf`."""

from rlhf_math.commands import main

main()
