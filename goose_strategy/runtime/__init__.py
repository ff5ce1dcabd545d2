"""The one core under both doors: mesh, sharding, calls, steps. Imports no Lightning."""
