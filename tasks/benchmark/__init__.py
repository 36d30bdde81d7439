"""The benchmark: which recipe reaches an accuracy for the least compute, tuned alike.

`protocol` reads the file that is fixed before the runs, `cells` runs one of them, `runner` all that
are missing, `results` keeps a line each, `headline` compares."""
