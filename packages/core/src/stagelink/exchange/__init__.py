"""The handler: links, windows, sessions, and the messages between them."""
