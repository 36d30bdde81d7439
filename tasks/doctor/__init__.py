"""What is wrong with a project, found before anything is spent. Loaded by name, as the stages are."""
