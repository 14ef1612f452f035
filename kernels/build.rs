//! Nothing, but for feature `emulated`: there the kernels in cuda/ are compiled as C++ for the
//! host, with the compiler's access callbacks, into a library with one table of all kernels.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "emulated")]
    emulated::build();
}

#[cfg(feature = "emulated")]
mod emulated {
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    type Kernel = (String, String);

    pub fn build() {
        let here = PathBuf::from(var("CARGO_MANIFEST_DIR"));
        let out = PathBuf::from(var("OUT_DIR"));
        for dir in ["cuda", "tests/emulated/kernels"] {
            println!("cargo:rerun-if-changed={}", here.join(dir).display());
        }
        let mut own = compiler(&here);
        own.file(here.join("cuda/host.cc"));
        for object in objects(&here, &here.join("cuda"), &out, "quintet_emu_modules") {
            own.object(object);
        }
        own.compile("quintet_emulated");

        // Kernels of the tests, for test programs and the driver shim only.
        let planted = here.join("tests/emulated/kernels");
        if planted.is_dir() {
            let mut tests = compiler(&here);
            tests.cargo_metadata(false);
            for object in objects(&here, &planted, &out, "quintet_emu_planted") {
                tests.object(object);
            }
            tests.compile("quintet_planted");
            let library = out.join("libquintet_planted.a");
            println!("cargo:rustc-link-arg-tests={}", library.display());
            println!("cargo:planted={}", out.display());
        }
    }

    fn var(name: &str) -> String {
        env::var(name).unwrap_or_default()
    }

    fn compiler(here: &Path) -> cc::Build {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .cpp_link_stdlib(None)
            .std("c++17")
            .include(here.join("cuda"))
            .opt_level(1)
            .debug(false)
            .warnings(true)
            .flag("-g1")
            .flag("-fno-exceptions")
            .flag("-fno-rtti")
            .flag("-fno-threadsafe-statics");
        build
    }

    /// Compiles the `.cu` files of a folder, and a table of their kernels named `table`.
    fn objects(here: &Path, folder: &Path, out: &Path, table: &str) -> Vec<PathBuf> {
        let mut build = compiler(here);
        build
            .flag("-fsanitize=thread")
            .flag("-fno-builtin")
            .flag("-fno-strict-aliasing")
            .flag("-ffp-contract=off")
            .flag_if_supported("--param=tsan-instrument-func-entry-exit=0");
        let (mut declared, mut rows) = (String::new(), String::new());
        for file in sources(folder) {
            let module = file.file_stem().unwrap_or_default().to_string_lossy();
            let body: String = kernels(here, &file)
                .iter()
                .map(|(name, bound)| format!("EMU_KERNEL({name}, {bound}),\n"))
                .collect();
            let text = format!(
                "#include \"prelude.cuh\"\n#include \"{}\"\n#include \"table.cuh\"\n\
                 extern \"C\" {{\nextern const EmuKernel {table}_{module}[];\n\
                 extern const unsigned {table}_{module}_count;\n\
                 const EmuKernel {table}_{module}[] = {{\n{body}}};\n\
                 const unsigned {table}_{module}_count = sizeof {table}_{module} / sizeof(EmuKernel);\n}}\n",
                file.display()
            );
            let path = out.join(format!("{table}_{module}.cc"));
            write(&path, &text);
            build.file(path);
            declared += &format!("extern const EmuKernel {table}_{module}[];\n");
            let count = kernels(here, &file).len();
            rows += &format!("{{\"{module}\", {table}_{module}, {count}}},\n");
        }
        let text = format!(
            "#include \"table.cuh\"\nextern \"C\" {{\n{declared}\
             extern const EmuModule {table}[];\nextern const unsigned {table}_count;\n\
             const EmuModule {table}[] = {{\n{rows}}};\n\
             const unsigned {table}_count = sizeof {table} / sizeof(EmuModule);\n}}\n"
        );
        let path = out.join(format!("{table}.cc"));
        write(&path, &text);
        build.file(path);
        build.compile_intermediates()
    }

    fn sources(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut files: Vec<_> = entries.map(|e| e.path()).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "cu"));
        files.sort();
        files
    }

    fn write(path: &Path, text: &str) {
        if let Err(error) = fs::write(path, text) {
            println!("cargo:error={}: {error}", path.display());
        }
    }

    /// The kernels of a file: the preprocessor leaves a mark for each KERNEL.
    fn kernels(here: &Path, file: &Path) -> Vec<Kernel> {
        let mut scan = compiler(here);
        let path = PathBuf::from(var("OUT_DIR")).join("scan.cc");
        let text = format!(
            "#define EMU_SCAN\n#include \"prelude.cuh\"\n#include \"{}\"\n",
            file.display()
        );
        write(&path, &text);
        let expanded = match scan.file(&path).try_expand() {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) => {
                println!("cargo:error={}: {error}", file.display());
                return Vec::new();
            }
        };
        let marks = expanded.split("emu_found(").skip(1);
        marks
            .filter_map(|mark| {
                // Of the bounds only the threads concern a host.
                let mut parts = mark.split(')').next()?.split(',').map(str::trim);
                Some((parts.next()?.into(), parts.next()?.into()))
            })
            .collect()
    }
}
