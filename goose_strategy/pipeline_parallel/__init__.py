"""Cut the depth: stages, schedules and the engine that runs them."""
