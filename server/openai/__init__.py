"""OpenAI's HTTP API: schemas, routes and framing."""
