"""The assignment of variables to methods: rules, policies and methods for layers."""
