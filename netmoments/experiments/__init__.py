"""What the command line runs: one file a table or figure, each with its configuration, its run and its drawing."""
