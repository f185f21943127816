"""What the command's verbs do, apart from reading the command line: see `tilewright.cli`."""
