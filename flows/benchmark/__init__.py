"""The benchmark: which recipe reaches an accuracy with the least compute, under equal tuning.

`protocol` reads the file that is fixed before the runs, `cells` runs one cell, `runner` all missing
cells, `results` stores a line per cell, `headline` compares recipes."""
