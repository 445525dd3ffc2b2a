"""What goes over the wire, in OpenAI's form: bodies, fields, answers and errors.  Knows no decoder and no server."""
