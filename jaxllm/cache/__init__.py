"""Where keys and values live: pages on the device, and the host's books of who owns them."""
