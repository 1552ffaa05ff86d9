"""The whole flow of data at the size of real runs, without a GPU."""
