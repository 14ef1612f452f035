//! Fuzz bodies that also run under cargo test over a kept corpus.
