"""From graded rollouts, conversations or preferences to the rows of a training batch."""
