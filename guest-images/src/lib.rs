//! placeholder text replaced by the crate's own documentation.
