"""Settings of Sphinx for the site; `build_site.py` names it."""

from sphinx.ext.napoleon import GoogleDocstring

# Napoleon takes the words before a colon in the text of an attribute for its type, and moves them
# behind it (sphinx 9.0, napoleon/docstring.py). Here types are in the annotations.
GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()

project = "toolkit"
html_title = "toolkit"
root_doc = "index"
# Generated tables have a class of their own: `{.fields}`.
myst_enable_extensions = ["attrs_block"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The anchors of a code host, so that a link to a heading holds there and here.
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # the default has no tables
smartquotes = False  # they make a dash of `--` in a sentence

# A docstring has code between single backquotes.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # the Trainer's own methods have their page elsewhere
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 80

nitpicky = True
# Types of other packages, and types of the toolkit that are not public, have no page here.
nitpick_ignore_regex = [("py:.*", r"(?!toolkit\.).*"), ("py:.*", r"toolkit\..*\..*")]

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copyright = "the authors of toolkit, Apache-2.0"
html_last_updated_fmt = "%d %B %Y"
