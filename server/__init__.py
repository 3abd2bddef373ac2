"""The HTTP front end of jaxllm: OpenAI's API over an engine client. Import `jaxllm` for the library."""
