"""Processes that Ray places on several machines and monitors (`engine.cluster`)."""
