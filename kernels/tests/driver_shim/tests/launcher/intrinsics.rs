//! The wrappers of PTX on a GPU, or over the shim: the emulator's tests hold their host twins to the
//! same laws.

use quintet_kernels::launch::{Arg, Call, Launch, Stream};

use crate::{cuda, instructions};

macro_rules! laws {
    ($($name:ident ($($seed:literal)?);)*) => {
        $(#[test]
        fn $name() {
            instructions::$name(&cuda() $(, $seed)?);
        })*
    };
}

laws! {
    matrix_instructions_multiply(1);
    lanes_exchange(2);
    pipelines_and_named_barriers_are_clean();
    conversions_and_powers(3);
}

/// stmatrix came with sm_90.
#[test]
fn matrices_move_and_turn() {
    let device = cuda();
    if device.arch().0 >= 90 {
        instructions::matrices_move_and_turn(&device);
    }
}

/// Each is compiled before its arguments are counted.
#[test]
fn every_wrapper_compiles() {
    let device = cuda();
    let mut functions = vec![
        "product_bf16",
        "product_f16",
        "product_tf32",
        "lanes",
        "pipeline",
        "producer_and_consumer",
        "conversions",
        "powers",
    ];
    if device.arch().0 >= 90 {
        functions.extend(["move_1", "move_2_in", "move_4_out", "move_4_both"]);
    }
    for function in functions {
        let call = Call {
            module: "instructions",
            function,
            grid: [1, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            args: &[Arg::F32(0.0); 9],
        };
        let refused = device.launch(Stream(0), &call).unwrap_err().to_string();
        let wanted = format!("{function}: 9 arguments where the kernel takes");
        assert!(refused.contains(&wanted), "{refused}");
    }
}
