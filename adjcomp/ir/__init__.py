"""The data that all parts of adjcomp speak: stacks, costs, tasks, actions and plans."""
