"""What is told of a machine, a head or a target before anything is loaded: `specdec doctor` and `specdec inspect`."""
