package io.penstock.example

/** Error that the program which reads the output has exited. */
internal class BrokenPipe : Exception()

/** Writes the text to standard output, and flushes the output. */
internal fun write(text: String) {
    print(text)
    if (System.out.checkError()) throw BrokenPipe()
}
