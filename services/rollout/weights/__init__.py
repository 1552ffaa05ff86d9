"""A node's end of the weights' way to its engine. `trainer.weights` lists both ends."""
