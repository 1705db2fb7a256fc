"""The server: OpenAI's endpoints over the engine. Needs `pip install 'speculant[serve]'`."""
