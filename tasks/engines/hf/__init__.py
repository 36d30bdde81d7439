from tasks.engines.hf.engine import load as load
