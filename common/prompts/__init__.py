"""From a row of data to the text and the tokens of a prompt."""
