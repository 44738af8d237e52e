"""Other libraries' objects in a federation. Each module imports its library when it is first used."""
