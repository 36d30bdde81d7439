from tasks.engines.server.engine import load as load
from tasks.engines.server.lending import lend as lend
