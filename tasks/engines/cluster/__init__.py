"""Several machines: Ray places processes on them and watches them (`engine.cluster`)."""
