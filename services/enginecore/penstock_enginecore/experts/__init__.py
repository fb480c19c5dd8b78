"""Distribution of a model's experts over the ranks of a data-parallel group."""
