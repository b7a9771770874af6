"""Pure functions from data to new data, from a model to a verified plan. None of them imports the runtime."""
