from tasks.engines.server.engine import load as load
