"""Finding plugins, checking them, and choosing a transport for each link."""
