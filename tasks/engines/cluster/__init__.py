"""Processes on several machines, which Ray places and monitors (`engine.cluster`)."""
