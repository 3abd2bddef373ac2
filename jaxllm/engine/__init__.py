"""The engine core: it takes token ids, plans steps on the host, runs them on the device and gives tokens back."""
