"""The two doors: Fabric and Trainer."""
