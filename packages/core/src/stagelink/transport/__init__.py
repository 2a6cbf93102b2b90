"""The contract of transports, their loading and choice, and what plugin authors build on."""
