#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| quintet_fuzz::plans(data));
