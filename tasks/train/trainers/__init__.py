"""What trains a cell: this project's own loop, or another trainer."""
