"""The parts of the check: a file each, whose `rows` yields its results."""
