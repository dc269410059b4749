"""Facts of one machine: tiles that `tune` found, and where Metal pays; kept in a file of the user."""
