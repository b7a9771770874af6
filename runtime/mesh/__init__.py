"""Running a plan's part on each of several ranks: transfers, sums, and knowing when another rank has failed."""
