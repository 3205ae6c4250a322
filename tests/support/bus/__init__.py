"""Parts of a weight bus under test: processes, engines and a harness around them."""
