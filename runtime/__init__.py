"""What reads a plan and runs it. Nothing here imports a pass or the solver."""
